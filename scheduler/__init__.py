"""The control plane's decisions: which sequence gets which KV-cache blocks, and what each step computes.

Needs only the standard library, numpy and xxhash. Knows nothing of torch, Ray, sockets or text.
"""
