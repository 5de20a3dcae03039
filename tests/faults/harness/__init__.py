"""Load, faults and what must hold under them: one harness for the tests and the soak.

plan        what is asked and what is broken, drawn from a seed; pure
system      the processes and the proxies before them, and how each fault is carried out
load        one client per request: reads, dawdles, cancels, vanishes, comes back with its tokens
watch       what the processes hold: pages, sessions, tasks, file descriptors, memory
run         all of it together, and the report
"""
