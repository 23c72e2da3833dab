"""Engines that spread a model over processes: what each is told (plugins), and how an `Accelerator` drives it (strategies)."""
