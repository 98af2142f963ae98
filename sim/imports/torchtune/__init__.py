"""torchtune's YAML files as fields of a scenario."""
