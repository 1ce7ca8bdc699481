# Every documented argument acts: as on the inner optimizer alone, fed with the finite gradients unscaled.

steps <- list(
  list(c(0.25, -0.5), 1),
  list(c(3, 4), -8),
  list(c(1, Inf), 1),
  list(c(-0.125, 2), 0.5),
  list(c(1, 1), NaN),
  list(c(0.5, 0.5), 2),
  list(c(6, -8), 0.25)
)

finite <- Filter(function(gradients) all(is.finite(unlist(gradients))), steps)

variables <- function() list(variable(c(1, -2)), variable(4))

# Where the weights are after each step, and after training has ended.
path <- function(optimizer, step, steps) {
  variables <- variables()
  positions <- lapply(steps, function(gradients) {
    step(optimizer, variables, gradients)
    lapply(variables, numbers)
  })
  optimizer$finalize_variable_values(variables)
  c(positions, list(lapply(variables, numbers)))
}

take_bare_step <- function(optimizer, variables, gradients) {
  optimizer$apply(lapply(gradients, tensor), variables)
}

# A skipped step leaves the weights where the step before it did.
without_skipped <- function(positions) {
  positions[c(vapply(steps, function(gradients) all(is.finite(unlist(gradients))), NA), TRUE)]
}

acting <- list(
  weight_decay = list(weight_decay = 0.125),
  clipnorm = list(clipnorm = 1),
  clipvalue = list(clipvalue = 0.5),
  global_clipnorm = list(global_clipnorm = 1),
  gradient_accumulation_steps = list(gradient_accumulation_steps = 2L),
  use_ema = list(use_ema = TRUE),
  ema_momentum = list(use_ema = TRUE, ema_momentum = 0.5),
  ema_overwrite_frequency = list(use_ema = TRUE, ema_overwrite_frequency = 2L)
)

for (name in names(acting)) {
  test_that(paste(name, "acts as on the inner optimizer"), {
    need_python()
    given <- acting[[name]]
    ours <- path(do.call(optimizer_loss_scale, c(list(momentum()), given)), take_step, steps)
    bare <- path(do.call(momentum, given), take_bare_step, finite)
    expect_equal(without_skipped(ours), bare, tolerance = 1e-6)

    without <- do.call(optimizer_loss_scale, c(list(momentum()), given[names(given) != name]))
    expect_false(isTRUE(all.equal(ours, path(without, take_step, steps), tolerance = 1e-3)))
  })

  test_that(paste(name, "may be given to the inner optimizer instead"), {
    need_python()
    given <- acting[[name]]
    ours <- path(do.call(optimizer_loss_scale, c(list(momentum()), given)), take_step, steps)
    inner <- path(optimizer_loss_scale(do.call(momentum, given)), take_step, steps)
    expect_identical(inner, ours)
  })
}

test_that("two different values are an error", {
  need_python()
  expect_error(optimizer_loss_scale(sgd(clipnorm = 2), clipnorm = 1), "PolicyError.*clipnorm")
})

scales <- function(optimizer) {
  variables <- variables()
  vapply(steps, function(gradients) {
    take_step(optimizer, variables, gradients)
    optimizer$loss_scale
  }, 0)
}

test_that("initial_scale and dynamic_growth_steps act", {
  need_python()
  expect_identical(scales(optimizer_loss_scale(sgd(), 64)), c(64, 64, 32, 32, 16, 16, 16))
  expect_identical(scales(optimizer_loss_scale(sgd(), 64, 2)), c(64, 128, 64, 64, 32, 32, 64))
})

test_that("loss_scale_factor is a scale that does not move and still skips", {
  need_python()
  optimizer <- optimizer_loss_scale(momentum(), loss_scale_factor = 128)
  expect_identical(scales(optimizer), rep(128, length(steps)))
  expect_identical(optimizer$skipped_steps, 2L)
  ours <- path(optimizer_loss_scale(momentum(), loss_scale_factor = 128), take_step, steps)
  expect_equal(without_skipped(ours), path(momentum(), take_bare_step, finite), tolerance = 1e-6)
  inner <- optimizer_loss_scale(sgd(loss_scale_factor = 128))
  expect_identical(inner$loss_scale, 128)
})

test_that("name names", {
  need_python()
  expect_identical(optimizer_loss_scale(sgd(), name = "mine")$name, "mine")
})
