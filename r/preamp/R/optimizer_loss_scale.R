# The one function of this package. It decides which arguments reach Python and under which name. What a value
# may be is decided in values.R, what is said when Python lacks something in python.R; what a loss scale does
# is decided in Python alone.

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
  # R has matched `dynamic = TRUE` to `dynamic_growth_steps` by now, so its own matching is not looked at.
  arguments <- matched(as_written(sys.call(), parent.frame()))
  need_reticulate()
  arguments <- prepared(arguments)
  speaking_plainly(do.call(loss_scale_optimizer_class(), arguments))
}

# The arguments of a call under the names they were written with; one left empty is NULL.
as_written <- function(call, frame) {
  call[[1L]] <- list
  empty <- vapply(as.list(call), function(part) identical(part, quote(expr = )), NA)
  call[empty] <- list(NULL)
  eval(call, frame)
}

# Whole names only; then the unnamed ones, in order, for the arguments before the dots.
matched <- function(arguments) {
  names(arguments) <- names(arguments) %||% character(length(arguments))
  refuse_unknown_names(setdiff(names(arguments), ""))
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

# What goes through the dots to Python; it has no other argument.
THROUGH_DOTS <- c("dynamic", "policy")

refuse_unknown_names <- function(written) {
  formal <- setdiff(names(formals(optimizer_loss_scale)), "...")
  for (name in setdiff(written, c(formal, THROUGH_DOTS))) {
    meant <- formal[startsWith(formal, name)]
    if (length(meant)) {
      stop("`", name, "` is not an argument of optimizer_loss_scale(), and names are not completed. Write ",
           paste0(meant, " =", collapse = " or "), ".", call. = FALSE)
    }
    known <- c(formal, THROUGH_DOTS)
    nearest <- known[which.min(utils::adist(name, known, ignore.case = TRUE))]
    stop("unused argument `", name, "`: optimizer_loss_scale() has none of this name. The nearest is `", nearest,
         "`. Write ", nearest, " =, or leave it out.", call. = FALSE)
  }
}

before_dots <- function() {
  known <- names(formals(optimizer_loss_scale))
  known[seq_len(match("...", known) - 1L)]
}

# What Python gets: checked values, nothing for what has Python's default.
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
