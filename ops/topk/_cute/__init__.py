"""Parts of the CuTe top-k kernel; importing any but this needs CuTe DSL."""
