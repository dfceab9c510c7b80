"""A discrete-event simulation of many engines, which drives the real `Scheduler` and `BlockManager`.

Only the GPU and the clock are simulated. In the order of use: `requests` (traces and arrival processes), `seconds` (how
long anything may take), `hardware` (what a model's shards need of a GPU), `step_time` (seconds of a step), `fit` and
`measured` (its coefficients, from `raytp bench`), `plain_steps` and `sparse_blocks` (the scheduler, at speed),
`replica` (one engine), `nodes`, `fleet` and `delays` (replicas that come and go, some of them slowly), `router`,
`cluster` (the simulation), `results`, `capacity` (how many replicas are needed).
Called by `raytp.cli.simulate` and `raytp.experiment.simulated`. Knows nothing of Ray or of a real engine.
"""
