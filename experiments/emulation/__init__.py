"""What runs in the workers of a measured job: real stores and arrays, and emulated computation."""
