# What is missing is missing here in earnest: an empty Python environment, an R library without reticulate.

empty_python <- function(holding = character()) {
  home <- tempfile("python")
  system2(Sys.getenv("RETICULATE_PYTHON"), c("-m", "venv", "--without-pip", shQuote(home)))
  site <- list.files(file.path(home, "lib"), pattern = "^python3", full.names = TRUE)
  for (package in holding) file.symlink(package, file.path(site, "site-packages", basename(package)))
  file.path(home, "bin", "python")
}

message_of_call <- function(python) {
  in_fresh_r(
    {
      object <- reticulate::import_builtins()$object()
      cat(conditionMessage(tryCatch(preamp::optimizer_loss_scale(object), error = identity)))
    },
    c(paste0("RETICULATE_PYTHON=", python), "PYTHONPATH=", "PYTHONNOUSERSITE=1")
  )
}

test_that("without the Python package preamp, the error holds the line that installs it", {
  need_python()
  python <- empty_python()
  message <- message_of_call(python)
  expect_match(message, "No module named 'preamp'", fixed = TRUE)
  expect_match(message, paste0(shQuote(python), " -m pip install 'preamp[keras]'"), fixed = TRUE)
})

test_that("without keras, the error holds the line that installs it", {
  need_python()
  preamp <- dirname(reticulate::import("preamp")$`__file__`)
  message <- message_of_call(empty_python(holding = preamp))
  expect_match(message, "keras is missing", fixed = TRUE)
  expect_match(message, "pip install 'preamp[keras]'", fixed = TRUE)
})

test_that("without reticulate, the package loads and the error holds the line that installs it", {
  library <- tempfile("library")
  dir.create(library)
  file.copy(find.package("preamp"), library, recursive = TRUE)
  message <- in_fresh_r(
    {
      .libPaths(Sys.getenv("ONLY"), include.site = FALSE)
      stopifnot(!requireNamespace("reticulate", quietly = TRUE))
      cat(conditionMessage(tryCatch(preamp::optimizer_loss_scale(1), error = identity)))
    },
    c(paste0("ONLY=", library))
  )
  expect_match(message, "install.packages(\"reticulate\")", fixed = TRUE)
})
