# Four steps (finite, Inf, finite, finite), beside Keras' own class.

state <- function(optimizer, variable) {
  c(value = numbers(variable), scale = numbers(optimizer$dynamic_scale),
    counter = numbers(optimizer$step_counter),
    iterations = numbers(optimizer$inner_optimizer$iterations))
}

run <- function(optimizer, step, gradients) {
  variable <- variable(1)
  lapply(gradients, function(gradient) {
    step(optimizer, list(variable), list(gradient))
    state(optimizer, variable)
  })
}

gradients <- list(0.25, Inf, 0.5, 0.125)

test_that("four steps leave what Keras' own class leaves", {
  need_python()
  for (inner in list(sgd, momentum, function() keras()$optimizers$Adam(0.5))) {
    ours <- run(optimizer_loss_scale(inner(), 1024, 2), take_step, gradients)
    stock <- keras()$optimizers$LossScaleOptimizer(inner(), 1024, 2L)
    expect_identical(ours, run(stock, take_stock_step, gradients))
  }
})

test_that("four steps leave what the rule says", {
  need_python()
  after <- run(optimizer_loss_scale(sgd(), 1024, 2), take_step, gradients)
  expect_identical(do.call(rbind, after), rbind(
    c(value = 0.75, scale = 1024, counter = 1, iterations = 1),
    c(value = 0.75, scale = 512, counter = 0, iterations = 1),
    c(value = 0.25, scale = 512, counter = 1, iterations = 2),
    c(value = 0.125, scale = 1024, counter = 0, iterations = 3)
  ))
})

test_that("what happened reads as R numbers", {
  need_python()
  optimizer <- optimizer_loss_scale(sgd(), 1024)
  expect_null(optimizer$last_step)
  weight <- variable(1)
  for (gradient in list(1, -Inf, NaN)) take_step(optimizer, list(weight), list(gradient))
  expect_identical(optimizer$loss_scale, 256)
  expect_identical(optimizer$skipped_steps, 2L)
  expect_identical(optimizer$last_step$scale, 512)
  expect_true(optimizer$last_step$skipped)
})
