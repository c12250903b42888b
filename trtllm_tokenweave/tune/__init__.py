"""The tuner: finds by measurement which split and launch configuration each step size should have."""
