"""Several engines that answer as one, and whose number may change while they do.

`pool.ReplicaPool` is what a batch job uses in place of an `LLM`. It owns `replica.Replica`s, each an engine with a
thread that feeds it; hands them rows from `backlog`, those with a common beginning to the same one (`homes`); and asks
`raytp.scaling` how many there should be, by what `gauge` has measured. `crew` says how many there are, `failures`
whether there may be more.
`raytp.experiment.real` uses the pool as a batch job does, for rows that arrive over time.

Nothing here imports Ray: an engine is an `LLM`, however it was started. Must not know of files, formats or records.
"""
