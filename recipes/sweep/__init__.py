"""Many runs from one command: what is searched, what each run is given, what has come of them."""
