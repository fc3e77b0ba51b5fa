//! Growth of a figure: a linear trend and its confidence.

use statrs::distribution::{ContinuousCDF as _, StudentsT};

/// Values of one figure from several servers, each of which has its own level.
#[derive(Default)]
pub(super) struct Series(Vec<Point>);

struct Point {
    life: u64,
    x: f64,
    y: f64,
}

pub(super) struct Trend {
    /// Means of the first and second half of each server's run.
    pub(super) first: f64,
    pub(super) second: f64,
    pub(super) slope: f64,
    /// Half-width of the 95 % confidence interval.
    pub(super) interval: f64,
    /// Standard error, and degrees of freedom.
    error: f64,
    freedom: usize,
}

impl Series {
    pub(super) fn add(&mut self, life: u64, x: f64, y: f64) {
        self.0.push(Point { life, x, y });
    }

    /// Trend by least squares, with a separate level for each server; `None` if there are too few points.
    pub(super) fn trend(&self) -> Option<Trend> {
        let mut lives: Vec<u64> = self.0.iter().map(|point| point.life).collect();
        lives.sort_unstable();
        lives.dedup();
        let (mut around, mut first, mut second) = (Vec::new(), Vec::new(), Vec::new());
        for life in &lives {
            let own: Vec<&Point> = self.0.iter().filter(|point| point.life == *life).collect();
            let (x, y) = (mean(own.iter().map(|point| point.x)), mean(own.iter().map(|point| point.y)));
            around.extend(own.iter().map(|point| (point.x - x, point.y - y)));
            let half = own.len() / 2;
            first.extend(own[..half].iter().map(|point| point.y));
            second.extend(own[own.len() - half..].iter().map(|point| point.y));
        }
        let freedom = around.len().checked_sub(lives.len() + 1).filter(|freedom| *freedom > 0)?;
        let spread: f64 = around.iter().map(|(x, _)| x * x).sum();
        if spread == 0.0 || first.is_empty() {
            return None;
        }
        let slope = around.iter().map(|(x, y)| x * y).sum::<f64>() / spread;
        let rest: f64 = around.iter().map(|(x, y)| (y - slope * x).powi(2)).sum();
        let error = (rest / freedom as f64 / spread).sqrt();
        Some(Trend {
            first: mean(first.into_iter()),
            second: mean(second.into_iter()),
            slope,
            interval: error * student(freedom, 1),
            error,
            freedom,
        })
    }
}

impl Trend {
    /// True if the figure grows significantly and by more than `share` of its level. If `figures` figures are tested, the probability of
    /// any false positive is at most 2.5 % (Bonferroni correction).
    pub(super) fn grows(&self, share: f64, figures: usize) -> bool {
        self.slope - self.error * student(self.freedom, figures) > share * self.first.abs().max(1.0)
    }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len();
    if count == 0 { 0.0 } else { values.sum::<f64>() / count as f64 }
}

/// Quantile of Student's t that at least one of `draws` draws exceeds with a probability of at most 2.5 %.
fn student(freedom: usize, draws: usize) -> f64 {
    let quantile = |student: StudentsT| student.inverse_cdf(1.0 - 0.025 / draws.max(1) as f64);
    StudentsT::new(0.0, 1.0, freedom as f64).map_or(f64::INFINITY, quantile)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(series: &mut Series, life: u64, level: f64, slope: f64) {
        for step in 0..20_u32 {
            let x = f64::from(step) / 10.0;
            series.add(life, x, level + slope * x + f64::from(step % 3));
        }
    }

    #[test]
    fn growth_is_distinguished_from_noise() {
        let (mut grows, mut stays) = (Series::default(), Series::default());
        for (life, level) in [(1, 1_000.0), (2, 3_000.0)] {
            points(&mut grows, life, level, 80.0);
            points(&mut stays, life, level, 0.0);
        }
        let [grows, stays] = [grows, stays].map(|series| series.trend().expect("many points"));
        assert!(
            (grows.slope - 80.0).abs() < 1.0 && grows.interval < 2.0,
            "{} {}",
            grows.slope,
            grows.interval
        );
        assert!(grows.grows(0.02, 45) && grows.second > grows.first + 70.0);
        assert!(stays.slope.abs() < stays.interval && !stays.grows(0.0, 1));
    }

    #[test]
    fn too_few_points_give_no_trend() {
        let mut series = Series::default();
        series.add(1, 0.0, 5.0);
        series.add(1, 1.0, 5.0);
        assert!(series.trend().is_none());
        series.add(1, 2.0, 5.0);
        let trend = series.trend().expect("one degree of freedom");
        assert!(trend.slope == 0.0 && trend.interval == 0.0 && !trend.grows(0.0, 1));
    }

    /// If many figures are tested, noise that would pass a single test one time in forty must not be reported as growth.
    #[test]
    fn many_figures_need_stronger_evidence() {
        let mut series = Series::default();
        // The slope is about 2.5 times its standard error.
        for step in 0..20_u32 {
            let noise = if step % 2 == 0 { 1.0 } else { -1.0 };
            series.add(1, f64::from(step), 100.0 + 0.12 * f64::from(step) + noise);
        }
        let trend = series.trend().expect("many points");
        assert!(trend.grows(0.0, 1) && !trend.grows(0.0, 45), "{} {}", trend.slope, trend.error);
    }
}
