"""The API surfaces: one router each, thin adapters over the orchestrator. Nothing here imports a tensor library."""
