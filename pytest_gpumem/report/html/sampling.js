// The points that a chart draws: for each stretch, the highest and lowest point of each series.

// Sorted positions between `from` and `to` of the extremes of each `series` (an array of numbers by
// position) in each of `stretches` stretches.
function extremes(series, from, to, stretches) {
  const count = to - from + 1;
  if (count <= 2 * stretches) return Array.from({ length: count }, (_, i) => from + i);
  const kept = [from, to];
  for (let stretch = 0; stretch < stretches; stretch++) {
    const begin = from + Math.floor(count * stretch / stretches);
    const end = from + Math.floor(count * (stretch + 1) / stretches);
    for (const values of series) {
      let [low, high] = [begin, begin];
      for (let i = begin + 1; i < end; i++) {
        if (values[i] > values[high]) high = i;
        else if (values[i] < values[low]) low = i;
      }
      kept.push(low, high);
    }
  }
  return [...new Set(kept)].sort((a, b) => a - b);
}

// The first position of the highest value.
function highestOf(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}
