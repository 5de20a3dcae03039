"""One model in several processes, its ranks. Each rank has a part of every layer (tensor parallel).

order        what a rank gets at start
processes    starts the other ranks of this machine
meeting      where ranks find each other; `sameness` checks that they have the same model
ranks        how they communicate; `board` is their shared memory
leader       rank 0; `follower`: the process of another rank
mirror       the steps that rank 0 sends
shard        loads a rank's part; `small` makes a small model for the check
cuts         which part of each weight a rank has; `weights` and `coded` read it
layers       what a rank's decoder needs from the others
"""
