"""`raytp bench`: measures the whole engine on random weights, next to the floor that the hardware sets.

In the order of use: `plan` (what to run), `run`, `measure`, `floor`, `record` (JSON), `table`. Called by
`raytp.cli.bench`.
`shapes/` holds config.json files of models to measure, so that nothing needs to be downloaded.
"""
