"""The tracing bench: what spans cost, in alternated pairs with and without."""
