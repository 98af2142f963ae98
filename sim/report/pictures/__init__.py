"""Pictures of a step, of memory, of pipelines and of sweeps. Knows matplotlib; import it when something is drawn."""
