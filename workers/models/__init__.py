"""The supported architectures. `registry` and the small files it lists need no torch; `decoder` is the network."""
