# The way to Python, and what is said when a part of it is missing.

need_reticulate <- function() {
  # Imported by DESCRIPTION only, so that this message can be reached at all.
  if (!requireNamespace("reticulate", quietly = TRUE)) {
    stop("the R package 'reticulate', the way from R to Python, is not installed. ",
         "Write install.packages(\"reticulate\").", call. = FALSE)
  }
}

loss_scale_optimizer_class <- function() {
  module <- tryCatch(reticulate::import("preamp.keras"), error = function(cause) {
    python <- if (reticulate::py_available()) reticulate::py_config()$python else "python"
    stop("Python cannot import preamp.keras (", trimws(conditionMessage(cause)), "). In a terminal, write\n  ",
         shQuote(python), " -m pip install 'preamp[keras]'\nand start R anew. Another Python is chosen with ",
         "Sys.setenv(RETICULATE_PYTHON = \"/path/to/python\") before the first Python object is made.",
         call. = FALSE)
  })
  module$LossScaleOptimizer
}

# Python's refusals name the value and the line to write: that text is all that an R user needs.
speaking_plainly <- function(call) {
  tryCatch(call, error = function(cause) stop(trimws(conditionMessage(cause)), call. = FALSE))
}
