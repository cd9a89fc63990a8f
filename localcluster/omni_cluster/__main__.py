"""`python -m omni_cluster ...` is the same as `omni cluster ...`."""

from omni_cluster.cli import app

if __name__ == "__main__":
    app(prog_name="omni cluster")
