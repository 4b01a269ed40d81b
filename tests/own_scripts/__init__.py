"""Training scripts of the kinds that people have: run by the tests as their owners would run them."""
