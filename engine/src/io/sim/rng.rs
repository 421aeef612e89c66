//! A small seeded pseudo-random generator (xoshiro256**, seeded by splitmix64), so that a run is its seed.
//!
//! Not for secrets. The sequence of a seed is part of what a recorded regression seed means: do not change it.

/// A deterministic stream of numbers.
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// The stream of `seed`; neighbouring seeds give unrelated streams.
    #[must_use]
    pub fn new(seed: u64) -> Rng {
        let mut x = seed;
        Rng {
            state: std::array::from_fn(|_| {
                x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
                mix(x)
            }),
        }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        // The high half of the product is uniform enough for tests and needs no loop.
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// An index into a collection of `len` elements.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in `hits` of `of` cases.
    pub fn odds(&mut self, hits: u64, of: u64) -> bool {
        self.below(of) < hits
    }

    /// One of `choices`.
    ///
    /// # Panics
    /// When there are none.
    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.index(choices.len())]
    }

    /// A stream of its own, so that what it draws does not shift this one.
    pub fn fork(&mut self) -> Rng {
        Rng::new(self.bits())
    }
}

/// The output function of splitmix64; also a good way to fold a word into a hash.
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_fixes_the_stream_and_numbers_stay_in_range() {
        let mut a = Rng::new(7);
        let mut b = Rng::new(7);
        let mut c = Rng::new(8);
        assert!((0..100).all(|_| a.bits() == b.bits()));
        assert!((0..100).any(|_| a.bits() != c.bits()));
        let mut seen = [false; 10];
        for _ in 0..1000 {
            seen[a.below(10) as usize] = true;
            assert!((5..=9).contains(&a.between(5, 9)));
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!(a.below(0), 0);
        assert!((0..100).all(|_| !a.odds(0, 5) && a.odds(5, 5)));
    }
}
