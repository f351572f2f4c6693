// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"os"
	"reflect"

	"github.com/segue-lb/segue/internal/generation"
)

// generationsFile returns the path of the instance's file of generations, or an empty path if the
// configuration has no directory for it.
func (b *Balancer) generationsFile() string {
	if b.cfg.Node.State == "" {
		return ""
	}
	return generation.File(b.cfg.Node.State, b.cfg.Node.Instance)
}

// loadGenerations reads the generations that an earlier process of this balancer, or another
// balancer, has written. A file that cannot be read is set aside, because a balancer without former
// generations is better than none.
func (b *Balancer) loadGenerations() generation.Generations {
	path := b.generationsFile()
	if path == "" {
		return generation.Generations{}
	}
	former, err := generation.Load(path)
	if err == nil {
		b.saved = former
		return former
	}
	aside := path + ".invalid"
	b.log.Error("the former generations are unknown: flows of other balancers may not be found after "+
		"changes of servers", "error", err, "kept", aside)
	if err := os.Rename(path, aside); err != nil {
		b.log.Error("set the file of generations aside", "error", err)
	}
	return generation.Generations{}
}

// saveGenerations writes the generations for the next process, if they have changed.
func (b *Balancer) saveGenerations() {
	path := b.generationsFile()
	if path == "" || reflect.DeepEqual(b.generations, b.saved) {
		return
	}
	if err := b.generations.Save(path); err != nil {
		b.log.Error("the generations of the services are not saved: a restart forgets the former ones",
			"error", err)
		return
	}
	b.saved = b.generations
}
