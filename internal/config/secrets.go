// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// ReadSecrets reads the files with keys and passwords into f.Secrets. The error is of type
// fieldpath.Errors. It names fields and files, and never quotes the content of a file.
func (f *Files[D]) ReadSecrets() error {
	var signalKey string
	var speaker *desired.BGP
	switch state := any(f.File).(type) {
	case *desired.Balancer:
		signalKey, speaker = state.Node.SignalKey, state.BGP
	case *desired.Agent:
		signalKey = state.Node.SignalKey
	}
	var problems fieldpath.Errors
	note := func(err error) {
		var some fieldpath.Errors
		var one *fieldpath.Error
		switch {
		case errors.As(err, &some):
			problems = append(problems, some...)
		case errors.As(err, &one):
			problems = append(problems, one)
		case err != nil:
			problems = append(problems, &fieldpath.Error{Problem: err.Error()})
		}
	}
	var err error
	f.Secrets.SignalKeys, err = ReadSignalKeys(signalKey)
	note(err)
	f.Secrets.Passwords, err = ReadPasswords(speaker)
	note(err)
	return problems.OrNil()
}
