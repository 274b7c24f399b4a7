"""Frameworks that ``bench recovery`` is compared with: start, kills and end of each.

Each peer trains the job's model whole in every process (plain modules, torch's AdamW, data parallel),
with the same initial weights, the same batches in the same order, as many workers, the same interval of
checkpoints, and a step padded to the time that a step of ours took. Its settings stand in its module as
data, with the reason beside each.
"""
