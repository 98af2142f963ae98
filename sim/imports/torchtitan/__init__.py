"""torchtitan's TOML files as fields of a scenario."""
