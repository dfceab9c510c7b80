"""Experiments with autoscaling: one file, three kinds of cluster, several policies, pictures.

In the order of use: `spec` (what an experiment is), `reading`, `yaml_file` and `section` (from YAML), `running` (all
runs, one after another), `workloads` (what arrives), `simulated` (a run in `raytp.simulator`), `real` (a run on a Ray
cluster, by `raytp.replicas`), `fake_cluster` and `fake_guard` (a Ray cluster of fake nodes on one machine, with Ray's
own autoscaler), `folder` (where results go), `tables` (CSV and JSON), `curves`, `pictures` and `comparison` (PNG),
`side_by_side` and `report` (HTML). Called by `raytp.cli.experiment`. Only `real` and `fake_cluster` import Ray.
"""
