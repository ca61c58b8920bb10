"""Chooses the variant that runs a call: finds variants, ranks the legal ones by tables, binds and keeps the choice."""
