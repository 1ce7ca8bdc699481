refused <- function(code, ...) {
  error <- expect_error(code)
  expect_null(conditionCall(error))
  for (words in c(...)) expect_match(conditionMessage(error), words, fixed = TRUE)
}

optional <- c("name", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum",
              "ema_overwrite_frequency", "loss_scale_factor", "gradient_accumulation_steps")

settings <- function(optimizer) {
  config <- optimizer$get_config()
  config[setdiff(names(config), c("name", "inner_optimizer"))]
}

test_that("NULL is Python's default in every argument", {
  need_python()
  plain <- optimizer_loss_scale(sgd())
  for (name in c("initial_scale", "dynamic_growth_steps", optional)) {
    optimizer <- do.call(optimizer_loss_scale, c(list(sgd()), structure(list(NULL), names = name)))
    expect_equal(settings(optimizer), settings(plain), label = name)
  }
  none <- optimizer_loss_scale(
    sgd(), NULL, NULL, name = NULL, weight_decay = NULL, clipnorm = NULL, clipvalue = NULL,
    global_clipnorm = NULL, use_ema = NULL, ema_momentum = NULL, ema_overwrite_frequency = NULL,
    loss_scale_factor = NULL, gradient_accumulation_steps = NULL, dynamic = NULL
  )
  expect_equal(settings(none), settings(plain))
})

test_that("an argument left empty has Python's default", {
  need_python()
  optimizer <- optimizer_loss_scale(sgd(), , 500)
  expect_identical(optimizer$loss_scale, 32768)
  expect_identical(optimizer$dynamic_growth_steps, 500L)
})

test_that("whole numbers become integers, other numbers floats", {
  need_python()
  builtins <- reticulate::import_builtins(convert = FALSE)
  is <- function(value, type) reticulate::py_to_r(builtins$isinstance(value, builtins[[type]]))
  optimizer <- optimizer_loss_scale(
    sgd(), 1024L, 2000, use_ema = TRUE, ema_overwrite_frequency = 3, gradient_accumulation_steps = 2,
    clipnorm = 1L
  )
  object <- reticulate::import("builtins", convert = FALSE)$getattr
  inner <- optimizer$inner_optimizer
  expect_true(is(object(optimizer, "dynamic_growth_steps"), "int"))
  expect_true(is(object(inner, "ema_overwrite_frequency"), "int"))
  expect_true(is(object(inner, "gradient_accumulation_steps"), "int"))
  expect_true(is(object(optimizer, "loss_scale"), "float"))
  expect_true(is(object(inner, "clipnorm"), "float"))
})

whole <- list(2.9, 3e9, Inf, -Inf, NaN, NA, NA_integer_, 0, -1L, TRUE, "2000", "auto", c(1, 2), integer(),
              list(5L), as.Date("2024-01-01"), factor("a"))

test_that("what is no whole number is refused in R, with the value and the line to write", {
  need_python()
  for (name in c("dynamic_growth_steps", "ema_overwrite_frequency", "gradient_accumulation_steps")) {
    for (value in whole) {
      given <- c(list(sgd()), structure(list(value), names = name))
      refused(do.call(optimizer_loss_scale, given), paste(name, "= "), paste("Write", name, "= "), "L.")
    }
  }
  refused(optimizer_loss_scale(sgd(), dynamic_growth_steps = 2.9), "2.9 must be a whole number of at least 1")
  refused(optimizer_loss_scale(sgd(), dynamic_growth_steps = 3e9), "3e+09 is more than", "2147483647")
  refused(optimizer_loss_scale(sgd(), dynamic_growth_steps = Inf), "Inf must be a whole number of at least 1")
  refused(optimizer_loss_scale(sgd(), gradient_accumulation_steps = 1), "1 must be a whole number of at least 2")
})

test_that("what is no number is refused in R, with the value and the line to write", {
  need_python()
  numbers <- c("initial_scale", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "ema_momentum",
               "loss_scale_factor")
  for (name in numbers) {
    for (value in list(Inf, -Inf, NaN, NA, -1, TRUE, "dynamic", c(1, 2), numeric(), list(1), Sys.time())) {
      given <- c(list(sgd()), structure(list(value), names = name))
      refused(do.call(optimizer_loss_scale, given), paste(name, "= "), "number", paste("Write", name, "= "))
    }
  }
  refused(optimizer_loss_scale(sgd(), 0), "initial_scale = 0 must be one finite number above 0")
  refused(optimizer_loss_scale(sgd(), use_ema = TRUE, ema_momentum = 1.1), "must be one number from 0 to 1")
})

test_that("a flag is TRUE or FALSE, a name one string", {
  need_python()
  for (value in list(NA, 1, "TRUE", c(TRUE, TRUE), logical())) {
    refused(optimizer_loss_scale(sgd(), use_ema = value), "use_ema = ", "must be TRUE or FALSE")
  }
  for (value in list(NA_character_, 1, "", c("a", "b"), character())) {
    refused(optimizer_loss_scale(sgd(), name = value), "name = ", "must be one string")
  }
})

test_that("the lines that refusals tell to write do work", {
  need_python()
  for (name in names(CHECKS)) {
    message <- conditionMessage(expect_error(checked(name, list())))
    line <- sub(".*Write (.*)\\.$", "\\1", message)
    call <- parse(text = paste0("optimizer_loss_scale(sgd(), ", line, ")"))
    expect_s3_class(eval(call), "python.builtin.object")
  }
})

test_that("a value that is Python's already is left to Python", {
  need_python()
  many <- reticulate::py_eval("2**24", convert = FALSE)
  expect_identical(optimizer_loss_scale(sgd(), dynamic_growth_steps = many)$dynamic_growth_steps, 16777216L)
  none <- reticulate::py_eval("-1", convert = FALSE)
  refused(optimizer_loss_scale(sgd(), dynamic_growth_steps = none), "PolicyError")
})

test_that("dynamic is an argument of its own", {
  need_python()
  grows_every <- function(...) optimizer_loss_scale(...)$dynamic_growth_steps
  expect_identical(grows_every(sgd(), dynamic = TRUE), 2000L)
  expect_identical(grows_every(sgd(), dynamic = TRUE, dynamic_growth_steps = 7), 7L)
  expect_identical(grows_every(sgd(), 1024, 7, dynamic = TRUE), 7L)
  expect_identical(optimizer_loss_scale(dynamic = TRUE, sgd(), 1024)$loss_scale, 1024)
  for (value in list(FALSE, NA, 0, 1, "TRUE", c(TRUE, TRUE))) {
    refused(optimizer_loss_scale(sgd(), dynamic = value), "dynamic = ", "loss_scale_factor = 32768")
  }
  refused(optimizer_loss_scale(sgd(), 1024, 7, dynamic = FALSE), "dynamic = FALSE")
})

test_that("no name is completed", {
  need_python()
  names <- c("inner_optimizer", "initial_scale", "dynamic_growth_steps", optional)
  prefixes <- unlist(lapply(names, function(name) substring(name, 1L, seq_len(nchar(name) - 1L))))
  for (prefix in setdiff(prefixes, "dynamic")) {
    given <- structure(list(sgd(), 5), names = c("inner_optimizer", prefix))
    expect_error(do.call(optimizer_loss_scale, given), label = prefix)
  }
  refused(optimizer_loss_scale(sgd(), dynamic_growth = 5), "`dynamic_growth`", "Write dynamic_growth_steps =")
  refused(optimizer_loss_scale(inner = sgd()), "`inner`", "Write inner_optimizer =")
  refused(optimizer_loss_scale(sgd(), clip = 5), "`clip`", "Write clipnorm = or clipvalue =")
})

test_that("arguments reach Python through wrappers, pipes and do.call", {
  need_python()
  grows_every <- function(optimizer) optimizer$dynamic_growth_steps
  wrapper <- function(...) optimizer_loss_scale(...)
  expect_identical(grows_every(wrapper(sgd(), dynamic_growth_steps = 3)), 3L)
  expect_identical(grows_every(do.call("optimizer_loss_scale", list(sgd(), 8, 3))), 3L)
  expect_identical(grows_every(preamp::optimizer_loss_scale(dynamic_growth_steps = 3, sgd())), 3L)
  made <- lapply(list(sgd(), sgd()), optimizer_loss_scale, dynamic_growth_steps = 3)
  expect_identical(vapply(made, grows_every, 0L), c(3L, 3L))
  each <- local({
    steps <- 5
    optimizer_loss_scale(sgd(), dynamic_growth_steps = steps)
  })
  expect_identical(grows_every(each), 5L)
})

test_that("an argument is evaluated once", {
  need_python()
  times <- 0
  optimizer_loss_scale(sgd(), {
    times <- times + 1
    8
  })
  expect_identical(times, 1)
})

test_that("further arguments go to Python by name", {
  need_python()
  static <- reticulate::import("preamp")$Static(1024)
  expect_identical(optimizer_loss_scale(sgd(), policy = static)$loss_scale, 1024)
  expect_identical(optimizer_loss_scale(sgd(), policy = NULL)$loss_scale, 32768)
  refused(optimizer_loss_scale(sgd(), 1024, 500L, 9), "the argument 9 has no name", "clipnorm = 9")
  refused(optimizer_loss_scale(sgd(), unheard_of = 9), "unheard_of")
  refused(optimizer_loss_scale(sgd(), unheard_of = NULL), "unheard_of")
  refused(optimizer_loss_scale(sgd(), 1024, policy = static), "PolicyError")
})

test_that("other arguments are passed on to Python, which names all that it does not have", {
  need_python()
  guard <- reticulate::import("preamp.guards")$SpikeGuard(warmup = 7L)
  optimizer <- optimizer_loss_scale(sgd(), guard = guard)
  expect_identical(optimizer$guard$warmup, 7L)
  expect_null(optimizer_loss_scale(sgd(), guard = NULL)$guard)
  refused(optimizer_loss_scale(sgd(), clip_norm = 5, polcy = 1), "`clip_norm`, `polcy`")
})

test_that("an inner optimizer is a Python optimizer", {
  need_python()
  for (value in list("sgd", NULL, 1, sgd, list(sgd()))) {
    refused(optimizer_loss_scale(value), "inner_optimizer = ", "import(\"keras\")$optimizers$SGD()")
  }
  refused(optimizer_loss_scale(), "inner_optimizer = NULL", "import(\"keras\")$optimizers$SGD()")
  refused(optimizer_loss_scale(keras()$optimizers$SGD), "inner_optimizer")
  refused(optimizer_loss_scale(optimizer_loss_scale(sgd())), "PolicyError")
})
