"""Runs the project's own scheduling, tree and session code on a virtual clock.

cli             the commands; `__main__` runs them
simulate        one simulation, from its input to its `report`
profile         the input: times of a machine; `modelled`: of machines that were not measured
traces          the input: texts and the draft's guesses
topology        the input: replicas, distances and load
timeline        the virtual clock; `devices` and `network`: where work and messages take time
cluster         builds everything from the input
replica         a service's core on the virtual clock; `target` and `drafter`: its models
orchestrator    the orchestrator on the virtual clock
clients         who sends the requests
lockstep        the baseline: an engine with both models on one device
measure         makes a profile of this machine; `record`: traces. `pair` runs the real models
capacity        the studies of docs/capacity.md; `plots` draws them
sensitivity     how much each constant matters
"""
