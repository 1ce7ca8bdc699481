# The suite runs once for each backend of Keras: KERAS_BACKEND names it before the first Python object is made.

# A Python that was asked for must work: what it lacks fails the tests. Only with none named are they skipped.
need_python <- function() {
  if (!nzchar(Sys.getenv("RETICULATE_PYTHON"))) skip("RETICULATE_PYTHON names no Python")
}

keras <- function() reticulate::import("keras")
backend <- function() keras()$backend$backend()

sgd <- function(...) keras()$optimizers$SGD(learning_rate = 1, ...)
momentum <- function(...) keras()$optimizers$SGD(learning_rate = 0.5, momentum = 0.5, ...)

tensor <- function(numbers) keras()$ops$convert_to_tensor(as.list(numbers), dtype = "float32")
variable <- function(numbers) keras()$Variable(as.list(numbers), dtype = "float32")

# Numbers of a tensor or a variable, by way of a Python list: no array is converted.
numbers <- function(tensor) keras()$ops$convert_to_numpy(tensor)$tolist()

# One step with a gradient for each variable, scaled as its loss would be.
take_step <- function(optimizer, variables, gradients) {
  gradients <- lapply(gradients, function(gradient) optimizer$scale_loss(tensor(gradient)))
  optimizer$apply(gradients, variables)
}

# Keras' own class fails in an eager apply() on JAX; there the same step is taken without state.
take_stock_step <- function(optimizer, variables, gradients) {
  if (backend() != "jax") return(take_step(optimizer, variables, gradients))
  if (!optimizer$built) optimizer$build(variables)
  gradients <- lapply(gradients, function(gradient) optimizer$scale_loss(tensor(gradient)))
  arrays <- function(variables) lapply(variables, function(variable) variable$value)
  after <- optimizer$stateless_apply(arrays(optimizer$variables), gradients, arrays(variables))
  assign_all(variables, after[[1L]])
  assign_all(optimizer$variables, after[[2L]])
}

assign_all <- function(variables, values) {
  for (i in seq_along(variables)) variables[[i]]$assign(values[[i]])
}

# Evaluates code in an R of its own and returns what it prints. `environment` holds NAME=value strings.
in_fresh_r <- function(code, environment) {
  script <- tempfile(fileext = ".R")
  on.exit(unlink(script))
  libraries <- paste0(".libPaths(", deparse1(dirname(find.package("preamp"))), ")")
  writeLines(c(libraries, deparse(substitute(code))), script)
  output <- suppressWarnings(system2(file.path(R.home("bin"), "Rscript"), c("--vanilla", script),
                                     stdout = TRUE, stderr = TRUE, env = environment))
  paste(output, collapse = "\n")
}
