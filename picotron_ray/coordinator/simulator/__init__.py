"""The machine against a simulated cluster: virtual time, seeded faults, invariants, coverage.

``run.simulate(seed)`` is deterministic to the last event, on any Python version: a failing seed replays.
What is simulated is what the machine can see: agents, workers and generations as state machines,
messages that are late, doubled, reordered or lost, a log with fencing, storage that fails and lags, a
second coordinator. What training computes is represented by its history: which generation did which
step; so a wrong restore, a lost or a repeated step shows as a wrong history, not as a wrong number.

- ``world``: clock, network, coordinator processes. ``nodes``: agents and workers. ``training``: one
  generation at work. ``slots``: its snapshots. ``storage``: log and uploads. ``planning``: the planner's
  process. ``faults`` and ``breakdowns``: what goes wrong and when. ``repetition``: failures that repeat.
  ``protocols``: each of them as the others see it.
- ``checks``: the invariants, written without the machine's own helpers. ``promptness``: what is due is done
  in seconds. ``coverage``: transition x fault.
"""
