library(testthat)
library(preamp)

test_check("preamp")
