// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"os"

	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/serversets"
)

// generationsFile returns the path of the instance's file of generations, or an empty path if the
// configuration has no directory for it.
func (b *Balancer) generationsFile() string {
	if b.cfg.Node.State == "" {
		return ""
	}
	return serversets.File(b.cfg.Node.State, b.cfg.Node.Instance)
}

// loadGenerations reads the generations that an earlier process of this balancer, or another
// balancer, has written. It returns none if the configuration has no directory for the file. If the
// file cannot be read, the balancer starts without former generations, because that is better than
// no balancer. The first save then sets the file aside.
func (b *Balancer) loadGenerations() serversets.Generations {
	path := b.generationsFile()
	if path == "" {
		return serversets.Generations{}
	}
	former, err := serversets.Load(path)
	if err == nil {
		b.saved = former
		return former
	}
	b.log.Error("the former generations are unknown: flows of other balancers may not be found after "+
		"changes of servers", "error", err)
	b.setAside = true
	return serversets.Generations{}
}

// saveGenerations writes the generations for the next process, if they have changed. If that fails,
// the next sweep tries again.
func (b *Balancer) saveGenerations() {
	path := b.generationsFile()
	if path == "" || b.generations.Equal(b.saved) {
		return
	}
	err := b.save(path)
	if err == nil {
		b.saved = b.generations
	}
	b.noteSave(err)
}

// noteSave reports and logs why the generations were not saved, unless the reason is that of the
// last time. It also reports that they are saved again. Events tell only the first failure and the
// next success.
func (b *Balancer) noteSave(err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	if problem == b.saveProblem {
		return
	}
	before := b.saveProblem
	b.saveProblem = problem
	if b.reportUnsaved != nil {
		b.reportUnsaved(problem)
	}
	if err != nil {
		b.log.Error("the generations of the services are not saved: a restart forgets the former ones",
			"error", err)
	}
	switch {
	case problem == "":
		b.events.Publish(events.Event{Kind: events.Saved})
	case before == "":
		b.events.Publish(events.Event{Kind: events.NotSaved, Reason: problem})
	}
}

// save writes the file of generations. A file that could not be read is renamed first, and kept.
func (b *Balancer) save(path string) error {
	if b.setAside {
		aside := path + ".invalid"
		if err := os.Rename(path, aside); err != nil {
			return fmt.Errorf("set the file aside that could not be read: %w", err)
		}
		b.log.Warn("a file of generations that could not be read is kept", "file", aside)
		b.setAside = false
	}
	return b.generations.Save(path)
}
