// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sync/errgroup"
)

// Settings tell how figures are made.
type Settings struct {
	// Quick makes figures with fewer runs and points. All of them together take some minutes.
	Quick bool
	// Seed is the seed of all random numbers. The same seed gives the same figures.
	Seed uint64
	// Workers is the number of runs that are computed at once, at least 1.
	Workers int
	// Directory is the directory for the figures. It is made if it does not exist.
	Directory string
	// Progress is called with what was done, by one goroutine at a time. It may be nil.
	Progress func(what string)
}

// Outcome is a figure and its result.
type Outcome struct {
	Figure
	Result
	// Stored tells that the result was already in the directory, made by the same program with the
	// same settings.
	Stored bool
}

// Make makes the figures that are not in the directory yet. It writes each when it is complete:
// NAME.csv and NAME.svg, with a number if there are several charts, and NAME.json, by which later
// runs find it. At the end it writes index.html and rows.csv, which show these figures and all others
// in the directory that were made by the same program with the same settings. Make can be interrupted
// at any point: all written figures are complete, and are not made again.
func Make(ctx context.Context, figures []Figure, s Settings) ([]Outcome, error) {
	store, err := openStore(s)
	if err != nil {
		return nil, err
	}
	var outcomes []Outcome
	for i, figure := range figures {
		s.tell("%s (%d of %d)", figure.Name, i+1, len(figures))
		outcome, err := store.makeOne(ctx, figure, s)
		if ctx.Err() != nil {
			return nil, fmt.Errorf("interrupted at figure %s: %w; those before it are in %s, and not made again",
				figure.Name, context.Cause(ctx), s.Directory)
		}
		if err != nil {
			return nil, fmt.Errorf("figure %s: %w", figure.Name, err)
		}
		if outcome.Stored {
			s.tell("%s was made before", figure.Name)
		}
		outcomes = append(outcomes, outcome)
	}
	all := store.withOthers(outcomes)
	return outcomes, errors.Join(store.writeRows(all), store.writePage(all))
}

// makeOne makes a figure, unless its result is stored.
func (s *store) makeOne(ctx context.Context, figure Figure, settings Settings) (Outcome, error) {
	if result, ok := s.load(figure.Name); ok {
		// The files of the charts may have been removed, so they are written again.
		return Outcome{figure, result, true}, s.saveCharts(figure.Name, result)
	}
	r := &run{Settings: settings, figure: figure.Name}
	if err := figure.make(ctx, r); err != nil {
		return Outcome{}, err
	}
	r.unexplained() // the last check
	if err := r.result.finite(); err != nil {
		return Outcome{}, err
	}
	r.result.agree()
	return Outcome{figure, r.result, false}, s.save(figure.Name, r.result)
}

func (s *Settings) tell(format string, args ...any) {
	if s.Progress != nil {
		s.Progress(fmt.Sprintf(format, args...))
	}
}

// pick returns the first value for quick figures, otherwise the second one.
func pick[T any](r *run, quick, full T) T {
	if r.Quick {
		return quick
	}
	return full
}

// each calls do for 0 to n-1, with up to Workers calls at once, and reports the progress. The
// result of do(i) must depend on i only.
func (r *run) each(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(max(1, r.Workers))
	var mu sync.Mutex
	done := 0
	for i := range n {
		group.Go(func() error {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := do(ctx, i); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			done++
			r.tell("%s: %d of %d", r.figure, done, n)
			return nil
		})
	}
	return group.Wait()
}
