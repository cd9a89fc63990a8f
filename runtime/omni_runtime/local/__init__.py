"""The plan of a pipeline as processes of this machine: what `omni run` starts, watches and ends."""
