"""Batch jobs: rows of files in, records out, each exactly once however often the job is killed and run again.

`api.batch` is `raytp.batch`, and what `raytp batch` calls: it finds the input (`readers`, `plain_format`,
`openai_request`), opens the output (`output`, `manifest`, `journal`, `parts`, `locations`), and lets `job` drive an
engine, or several (`engine_choice`), over what is left to do. It is not named `batch`: `raytp.batch` is the function.

Nothing here imports Ray or torch except `engine_choice`, when it starts an engine.
"""
