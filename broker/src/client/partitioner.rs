//! Which partition a record goes to: by key as Kafka's clients choose, else in turn.

use std::cell::Cell;

/// Chooses partitions of one topic.
#[derive(Debug)]
pub struct Partitioner {
    count: u32,
    next: Cell<u32>,
}

impl Partitioner {
    /// A partitioner over `count` partitions (at least 1).
    #[must_use]
    pub fn new(count: u32) -> Partitioner {
        Partitioner {
            count: count.max(1),
            next: Cell::new(0),
        }
    }

    /// The partition for a record: a key always gets the same one; without a key the partitions take turns.
    #[must_use]
    pub fn choose(&self, key: Option<&[u8]>) -> u32 {
        match key {
            Some(key) => (murmur2(key) & 0x7fff_ffff) % self.count,
            None => {
                let chosen = self.next.get();
                self.next.set((chosen + 1) % self.count);
                chosen
            }
        }
    }
}

/// MurmurHash2 (public domain, Austin Appleby), 32 bits, with the seed that Kafka's clients use, so that a key lands
/// in the same partition whichever client wrote it.
fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c ^ (data.len() as u32);
    let mut words = data.chunks_exact(4);
    for word in &mut words {
        let word = word
            .iter()
            .rev()
            .fold(0u32, |value, byte| value << 8 | u32::from(*byte));
        let mixed = word.wrapping_mul(M);
        let mixed = (mixed ^ (mixed >> 24)).wrapping_mul(M);
        hash = hash.wrapping_mul(M) ^ mixed;
    }
    let rest = words.remainder();
    if !rest.is_empty() {
        let word = rest
            .iter()
            .rev()
            .fold(0u32, |value, byte| value << 8 | u32::from(*byte));
        hash = (hash ^ word).wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_kafka_clients() {
        // Values published with the tests of Kafka's Java client.
        let cases: [(&[u8], i32); 6] = [
            (b"21", -973_932_308),
            (b"foobar", -790_332_482),
            (b"a-little-bit-long-string", -985_981_536),
            (b"a-little-bit-longer-string", -1_486_304_829),
            (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            (b"abc", 479_470_107),
        ];
        for (key, hash) in cases {
            assert_eq!(murmur2(key) as i32, hash, "{}", String::from_utf8_lossy(key));
        }
    }

    #[test]
    fn records_without_a_key_take_turns() {
        let partitioner = Partitioner::new(3);
        let chosen: Vec<u32> = (0..4).map(|_| partitioner.choose(None)).collect();
        assert_eq!(chosen, [0, 1, 2, 0]);
        assert_eq!(partitioner.choose(Some(b"abc")), partitioner.choose(Some(b"abc")));
    }
}
