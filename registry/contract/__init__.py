"""What a call asks (Problem, Target), what a variant claims to run (Requires, Variant), and how both are compared."""
