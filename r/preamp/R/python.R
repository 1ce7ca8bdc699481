# Access to Python, and the messages when a part of it is missing.

need_reticulate <- function() {
  # Imported by DESCRIPTION only, so that this message can be reached at all.
  if (!requireNamespace("reticulate", quietly = TRUE)) {
    stop("the R package 'reticulate', which connects R to Python, is not installed. ",
         "Write install.packages(\"reticulate\").", call. = FALSE)
  }
}

loss_scale_optimizer_class <- function() {
  module <- tryCatch(reticulate::import("preamp.keras"), error = function(cause) {
    python <- if (reticulate::py_available()) reticulate::py_config()$python else "python"
    stop("Python cannot import preamp.keras (", trimws(conditionMessage(cause)), "). In a terminal, write\n  ",
         shQuote(python), " -m pip install 'preamp[keras]'\nand restart R. To use another Python, write ",
         "Sys.setenv(RETICULATE_PYTHON = \"/path/to/python\") before the first Python object is made.",
         call. = FALSE)
  })
  module$LossScaleOptimizer
}

# Python's errors name the value and say what to write: an R user needs only that text.
speaking_plainly <- function(call) {
  tryCatch(call, error = function(cause) stop(trimws(conditionMessage(cause)), call. = FALSE))
}
