# The one function of this package. It decides which arguments reach Python, and under which names. values.R
# decides which values are allowed, and python.R has the messages for a Python that lacks something. Everything
# about loss scaling is decided in Python.

optimizer_loss_scale <- function(inner_optimizer,
                                 initial_scale = 32768,
                                 dynamic_growth_steps = 2000L,
                                 ...,
                                 name = NULL,
                                 weight_decay = NULL,
                                 clipnorm = NULL,
                                 clipvalue = NULL,
                                 global_clipnorm = NULL,
                                 use_ema = NULL,
                                 ema_momentum = NULL,
                                 ema_overwrite_frequency = NULL,
                                 loss_scale_factor = NULL,
                                 gradient_accumulation_steps = NULL) {
  # R has already matched `dynamic = TRUE` to `dynamic_growth_steps`, so its own matching is not used.
  arguments <- matched(as_written(sys.call(), parent.frame()))
  need_reticulate()
  arguments <- prepared(arguments)
  speaking_plainly(do.call(loss_scale_optimizer_class(), arguments))
}

# The arguments of a call, under the names that were written; an empty one is NULL.
as_written <- function(call, frame) {
  call[[1L]] <- list
  empty <- vapply(as.list(call), function(part) identical(part, quote(expr = )), NA)
  call[empty] <- list(NULL)
  eval(call, frame)
}

# Names have to be complete. Unnamed arguments are then assigned, in order, to those before the dots.
matched <- function(arguments) {
  names(arguments) <- names(arguments) %||% character(length(arguments))
  refuse_partial_names(setdiff(names(arguments), ""))
  unnamed <- which(names(arguments) == "")
  free <- setdiff(before_dots(), names(arguments))
  if (length(unnamed) > length(free)) {
    value <- shown(arguments[[unnamed[length(free) + 1L]]])
    stop("the argument ", value, " has no name, and only ", paste(before_dots(), collapse = ", "),
         " can be given without one. Write name = value, such as clipnorm = ", value, ".", call. = FALSE)
  }
  names(arguments)[unnamed] <- free[seq_along(unnamed)]
  arguments
}

# All other names go through the dots to Python, which says which it does not have.
refuse_partial_names <- function(written) {
  formal <- setdiff(names(formals(optimizer_loss_scale)), "...")
  for (name in setdiff(written, c(formal, "dynamic"))) {
    meant <- formal[startsWith(formal, name)]
    if (length(meant)) {
      stop("`", name, "` is not an argument of optimizer_loss_scale(), and partial names are not matched. Write ",
           paste0(meant, " =", collapse = " or "), ".", call. = FALSE)
    }
  }
}

before_dots <- function() {
  known <- names(formals(optimizer_loss_scale))
  known[seq_len(match("...", known) - 1L)]
}

# The arguments for Python: checked values, without those that have Python's default.
prepared <- function(arguments) {
  refuse_fixed_by_dynamic(arguments[["dynamic"]])
  check_inner_optimizer(arguments[["inner_optimizer"]])
  known <- c(names(CHECKS), "dynamic")
  default <- vapply(arguments, is.null, NA) & names(arguments) %in% known
  arguments <- arguments[!default & names(arguments) != "dynamic"]
  for (name in intersect(names(CHECKS), names(arguments))) {
    arguments[[name]] <- checked(name, arguments[[name]])
  }
  arguments
}

`%||%` <- function(value, otherwise) if (is.null(value)) otherwise else value
