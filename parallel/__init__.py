"""Where the model is computed: many processes that give the numbers of one. Applied to a built model from outside."""
