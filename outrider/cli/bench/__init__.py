"""`outrider bench`: how fast an endpoint answers, under a load like that of its users.

command          connects, sends the load, and reports
flags            the flags; `slo`: the bounds that --slo names
connect          makes the target that the flags name
target           a server, as the load sees it; `grpc_target`: ours, `openai_target`: any with that API
prompts          the prompts; `arrivals`: when they are sent
generator        sends requests and records their `outcomes`; `progress` shows them
figures          the figures of outcomes
report           what is printed and written; `machine`: where it was measured
"""
