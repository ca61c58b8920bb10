"""The built-in variants, one file or one small package each. They import the registry, never each other."""
