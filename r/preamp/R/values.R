# Which values can be sent to Python, and as which type. Every error names the value, the reason and what to
# write instead. Python checks ranges that depend on each other.

checked <- function(name, value) {
  if (is_python(value)) value else CHECKS[[name]](name, value)
}

whole <- function(least, instead) {
  function(name, value) {
    if (!is_one_number(value) || value != trunc(value) || value < least) {
      refuse(name, value, paste("must be a whole number of at least", least), instead)
    }
    if (value > .Machine$integer.max) {
      refuse(name, value, paste("is more than the largest integer of R,", .Machine$integer.max), instead)
    }
    as.integer(value)
  }
}

number <- function(holds, rule, instead) {
  function(name, value) {
    if (!is_one_number(value) || !holds(value)) refuse(name, value, paste("must be", rule), instead)
    as.double(value)
  }
}

above_zero <- function(instead) number(function(x) x > 0, "one finite number above 0", instead)

flag <- function(name, value) {
  if (!isTRUE(value) && !isFALSE(value)) refuse(name, value, "must be TRUE or FALSE", "TRUE")
  value
}

text <- function(name, value) {
  if (!is.character(value) || length(value) != 1L || is.na(value) || !nzchar(value)) {
    refuse(name, value, "must be one string", "\"loss_scale\"")
  }
  value
}

# By argument; in all of them NULL is Python's default and is not sent.
CHECKS <- list(
  initial_scale = above_zero("32768"),
  dynamic_growth_steps = whole(1, "2000L"),
  name = text,
  weight_decay = number(function(x) x >= 0, "one finite number of at least 0", "0.004"),
  clipnorm = above_zero("1"),
  clipvalue = above_zero("0.5"),
  global_clipnorm = above_zero("1"),
  use_ema = flag,
  ema_momentum = number(function(x) x >= 0 && x <= 1, "one number from 0 to 1", "0.99"),
  ema_overwrite_frequency = whole(1, "100L"),
  loss_scale_factor = above_zero("32768"),
  gradient_accumulation_steps = whole(2, "4L")
)

check_inner_optimizer <- function(value) {
  if (!is_python(value)) {
    refuse("inner_optimizer", value, "is not a Keras optimizer",
           "reticulate::import(\"keras\")$optimizers$SGD()")
  }
}

refuse_fixed_by_dynamic <- function(dynamic) {
  if (!is.null(dynamic) && !isTRUE(dynamic)) {
    stop("dynamic = ", shown(dynamic), " is not supported: TRUE is the only choice. ",
         "For a scale that does not move, write loss_scale_factor = 32768.", call. = FALSE)
  }
}

is_python <- function(value) inherits(value, "python.builtin.object")

# Dates, factors and 64-bit integers are numeric underneath, but mean something else.
is_one_number <- function(value) {
  is.numeric(value) && !is.object(value) && length(value) == 1L && is.finite(value)
}

refuse <- function(name, value, reason, instead) {
  stop(name, " = ", shown(value), " ", reason, ". Write ", name, " = ", instead, ".", call. = FALSE)
}

shown <- function(value) {
  if (is_python(value)) return(paste0("<", class(value)[[1L]], ">"))
  if (is.object(value)) return(paste0("<", class(value)[[1L]], ">"))
  short <- deparse1(value)
  if (nchar(short) > 60L) paste0(substr(short, 1L, 57L), "...") else short
}
