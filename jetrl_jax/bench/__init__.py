"""`jetrl bench`: figures measured on the machine at hand, kept as rows of data, and the page made from them."""
