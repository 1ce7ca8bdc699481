test_that("the signature is keras3's", {
  keras3 <- function(inner_optimizer,
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
                     gradient_accumulation_steps = NULL) NULL
  expect_identical(as.list(formals(optimizer_loss_scale)), as.list(formals(keras3)))
})

test_that("nothing else is exported", {
  expect_identical(getNamespaceExports("preamp"), "optimizer_loss_scale")
})

test_that("the result is the Python optimizer, wrapping the one that was given", {
  need_python()
  inner <- sgd()
  optimizer <- optimizer_loss_scale(inner)
  builtins <- reticulate::import_builtins()
  expect_true(builtins$isinstance(optimizer, reticulate::import("preamp.keras")$LossScaleOptimizer))
  expect_true(builtins$isinstance(optimizer, keras()$optimizers$LossScaleOptimizer))
  expect_identical(reticulate::py_id(optimizer$inner_optimizer), reticulate::py_id(inner))
})

test_that("the defaults shown in R are those in force", {
  need_python()
  optimizer <- optimizer_loss_scale(sgd())
  shown <- formals(optimizer_loss_scale)
  expect_identical(optimizer$loss_scale, shown$initial_scale)
  expect_identical(optimizer$dynamic_growth_steps, shown$dynamic_growth_steps)
})
