//! Damage at rest: bits that flip while the process is down, at places that matter.

use ringfence_engine::io::sim::{Rng, SimDisk};
use ringfence_engine::journal::{FileHeader, Frame, FrameHeader, Record};
use ringfence_engine::snapshot::SnapshotHeader;

/// What rots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rot {
    /// The newest snapshot of each shard.
    NewestSnapshot,
    /// The last frame of each shard's journal that holds a batch.
    LastFrame,
    /// One bit of one frame, or of the header of one journal file, that recovery may read.
    Journal,
}

impl Rot {
    /// Flips one bit of whatever it names.
    pub(super) fn spoil(self, disk: &mut SimDisk, rng: &mut Rng) {
        let mut shards = shards_of(disk);
        if self == Rot::Journal {
            let one = rng.index(shards.len().max(1));
            shards = shards.get(one).cloned().into_iter().collect();
        }
        for dir in shards {
            let place = match self {
                Rot::NewestSnapshot => newest_snapshot(disk, &dir).map(|path| (path, 40, 60)),
                Rot::LastFrame => last_data_frame(disk, &dir),
                Rot::Journal => pick(disk, &dir, rng),
            };
            if let Some((path, from, to)) = place {
                let hit = disk.flip_bit(&path, rng.between(from, to - 1), rng.below(8) as u8);
                assert!(hit, "{path} has a byte between {from} and {to}");
            }
        }
    }
}

fn names(disk: &SimDisk, dir: &str) -> Vec<String> {
    let names = disk.names(dir).unwrap_or_default();
    names
        .into_iter()
        .map(|entry| format!("{dir}/{}", entry.name))
        .collect()
}

/// Directories of the shards' journals; of the newest generation when a change of their number was cut short.
fn shards_of(disk: &SimDisk) -> Vec<String> {
    let generation = names(disk, "journal").pop();
    generation.map_or(Vec::new(), |generation| names(disk, &generation))
}

/// Path, and the range of bytes to hit.
type Place = (String, u64, u64);

fn newest_snapshot(disk: &SimDisk, dir: &str) -> Option<String> {
    let numbered = names(disk, dir).into_iter().filter_map(|path| {
        let bytes = disk.peek(&path)?;
        let header = SnapshotHeader::decode(&bytes, bytes.len() as u64).ok()?;
        Some((header.number, path))
    });
    numbered.max().map(|(_, path)| path)
}

/// Headers and frames of the journal's files, by address, and whether it is a frame with a batch.
fn journal_places(disk: &SimDisk, dir: &str) -> Vec<(u64, Place, bool)> {
    let mut places = Vec::new();
    for path in names(disk, dir) {
        let bytes = disk.peek(&path).unwrap_or_default();
        let Ok(file) = FileHeader::decode(&bytes) else {
            continue;
        };
        let (grain, len) = (u64::from(file.grain), bytes.len() as u64);
        places.push((file.first_lsn.0, (path.clone(), 0, 96), false));
        let mut pos = grain;
        while pos < len {
            let lsn = file.first_lsn.0 + pos - grain;
            let header = FrameHeader::decode(&bytes[pos as usize..], len - pos).ok();
            let Some(frame) = header.filter(|h| h.lsn.0 == lsn && h.incarnation == file.incarnation) else {
                break;
            };
            let end = pos + u64::from(frame.frame_len);
            let records = Frame::new(frame, &bytes[pos as usize..]).and_then(|frame| frame.directory());
            let batch = |record: &Record| matches!(record, Record::Append { .. });
            let has_batch = records.is_ok_and(|records| records.iter().any(batch));
            places.push((lsn, (path.clone(), pos, end), has_batch));
            pos = end;
        }
    }
    places.sort_by_key(|(lsn, place, _)| (*lsn, place.1));
    places
}

fn last_data_frame(disk: &SimDisk, dir: &str) -> Option<Place> {
    let frames = journal_places(disk, dir);
    let last = frames.into_iter().rev().find(|(_, _, has_batch)| *has_batch);
    last.map(|(_, place, _)| place)
}

fn pick(disk: &SimDisk, dir: &str, rng: &mut Rng) -> Option<Place> {
    let places = journal_places(disk, dir);
    let recent = places.len().saturating_sub(40);
    let from = if rng.odds(1, 2) { recent } else { 0 };
    let places = &places[from..];
    (!places.is_empty()).then(|| rng.pick(places).1.clone())
}
