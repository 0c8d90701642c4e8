"""The race: five workloads through this engine and through others that are installed, turn and turn about."""
