"""The arithmetic of attention on each kind of device.

Triton and flash-attn are imported here and nowhere else, and only when a GPU asks for them.
"""
