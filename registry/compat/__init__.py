"""The argument names and meanings of other libraries, in front of the registry's ops. Nothing of them is needed."""
