"""`raytp bench`: measures the whole engine on random weights, next to the floor that the hardware sets.

`shapes/` holds config.json files of models to measure, so that nothing needs to be downloaded.
"""
